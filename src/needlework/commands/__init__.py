"""The commands: each parses, calls one function and prints; nothing heavy is imported before."""

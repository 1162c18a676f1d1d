"""Experiments: plans, their trials, and resumable runs that write rows into a store."""

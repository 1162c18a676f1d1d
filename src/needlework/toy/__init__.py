"""The toy language: its words, its sentences, its fixed world, and questions about all of them. Free of torch."""

"""Which heads retrieve: ways to rank them, how far a ranking can be trusted, and the smallest set that suffices."""

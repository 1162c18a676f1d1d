"""From a plan to rows in a store: plans, the trials they stand for, runs that survive anything, exports."""

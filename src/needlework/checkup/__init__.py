"""The doctor: the laws that numbers rest on, tried on one model before anyone believes a number of it."""

"""Tasks make samples and score answers. Free of torch: a report is rebuilt without it."""

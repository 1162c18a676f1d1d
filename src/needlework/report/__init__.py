"""Reports: tables, figures and one self-contained page from the trials of one or more runs. Free of torch."""

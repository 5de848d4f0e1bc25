"""Several processes, one a host as a rule, that make one run: process 0 leads, the others follow."""

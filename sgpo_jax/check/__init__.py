"""`launch check`: what can be known of a run before anything is spent."""

"""What a person sees of a run when it is over."""

"""Completions for profiling, training and evaluation: engines, and judging what they give as it arrives."""

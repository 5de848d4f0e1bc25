"""Pure maths, arrays in and arrays out: advantages, losses, allocation, compute, estimators."""

"""The DAPO update and the loop around it."""

"""A file of a user's program that holds a number."""

COUNT = 0

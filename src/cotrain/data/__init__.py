"""Data sets and the task streams made of them."""

"""The suite of all benchmarks: what is run, in which turns, and what is made of it."""

"""Experiments: from a configuration to the records of its runs."""

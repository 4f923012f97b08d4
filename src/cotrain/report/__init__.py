"""Reports: tables and figures from the records of runs."""

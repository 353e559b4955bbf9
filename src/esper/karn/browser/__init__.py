"""`esper serve`: the runs of a folder in the browser, live."""

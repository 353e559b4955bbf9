"""Reading and writing: atomic files and folders, folders of tensors, numbered series, locks, logs and signals."""

"""Everything that touches a disk: files, folders of tensors, numbered series, locks and logs."""

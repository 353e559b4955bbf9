"""All Triton code, one file per family. Import these files only on CUDA: other builds do not include triton."""

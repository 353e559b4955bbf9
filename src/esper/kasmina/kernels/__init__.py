"""All Triton code, one file per family. Import a file only on CUDA: triton comes with CUDA builds alone."""

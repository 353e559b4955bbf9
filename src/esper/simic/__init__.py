"""Learning to decide. So far: the contracts that a growing host keeps."""

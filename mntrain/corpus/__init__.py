"""Files of text and of tokens: finding, tokenizing and reading them. No torch, no MPI."""

"""What corpora are made of: files, rows, tokens, sequences."""

"""Step programs: draft, verify, accept and commit as graphs over named tensors."""

"""One file per kind of drafter."""

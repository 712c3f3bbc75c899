"""One file per family of targets; makers with several have a folder."""

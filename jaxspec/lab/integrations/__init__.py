"""jaxspec in the programs of others; each module needs the extra of its name."""

raise ImportError("jaxspec.checkpoints is now jaxspec.files", name=__name__)

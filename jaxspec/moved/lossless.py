raise ImportError("jaxspec.lossless is now jaxspec.lab.lossless", name=__name__)

raise ImportError("jaxspec.training is now jaxspec.lab.training", name=__name__)

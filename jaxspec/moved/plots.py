raise ImportError("jaxspec.plots is now jaxspec.lab.plots", name=__name__)

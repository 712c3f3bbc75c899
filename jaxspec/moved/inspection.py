raise ImportError("jaxspec.inspection is now jaxspec.lab.inspection", name=__name__)

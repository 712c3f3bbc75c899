raise ImportError("jaxspec.integrations is now jaxspec.lab.integrations", name=__name__)

raise ImportError("jaxspec.openai is now jaxspec.service.openai", name=__name__)

raise ImportError("jaxspec.serve is now jaxspec.service.serve", name=__name__)

raise ImportError("jaxspec.batch is now jaxspec.service.batch", name=__name__)

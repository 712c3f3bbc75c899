raise ImportError("jaxspec.rows is now jaxspec.service.rows", name=__name__)

"""Old names of packages and modules that users import: importing one is an error that says the new name.

The folder is on the path of `jaxspec`, so `import jaxspec.plots` finds `plots.py` here.
"""

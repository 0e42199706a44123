"""One run = one YAML: the schema, the stages and the command line."""

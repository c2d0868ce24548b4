"""What `servekit doctor --help` says. It imports nothing, since help must appear at once."""

TEXT = """\
The settings are those of servekit serve: what is said is said of this configuration, without any of the default one.

Each line is ok, limited (it works, but slower or with less than it could) or missing (nothing can be served without
it), and where something can be done, the command that does it stands below.

Nothing is fetched, compiled or changed. Exit status: 0 if this machine can serve the configuration, 3 if it cannot.
"""

"""What an image can be made from, one module each."""

KINDS = ("docker_archive", "oci", "sif", "definition", "tarball", "debian", "python")

"""What goes before Apptainer in a mount namespace of its own: a tmpfs with a size, and the root that takes changes. No Django.

Apptainer's own ways fall short: for ordinary users its kernel overlay cannot remove directories of an image, fuse-overlayfs
loses what does not fit without an error, and the tmpfs of a container whose user is root inside has no size.
"""

from __future__ import annotations

from pathlib import Path

from sandboxes.protocol import Changes

MEMORY = "memory/places"  # in the work folder: for `--workdir`
ROOT = "root"  # the image with its layer and changes
_CHANGES = {Changes.MEMORY: "memory", Changes.DISK: "disk", Changes.REFUSED: ""}

# Arguments: the work folder, the tmpfs' size in MiB, the folder there for changes ("": refused), the image ("": none) and its
# layer. Where their paths have characters that have a meaning in the options of the overlay, they get other names first. Each
# program that is started here takes a millisecond of the start.
_SCRIPT = f"""
umask 022
cd "$1" && mount -n -c -t tmpfs -o "size=$2m,mode=0755" sandbox memory || exit
changes=${{4:+$3}}
mkdir {MEMORY} ${{changes:+"$changes/upper" "$changes/work"}} || exit
if [ "$4" ]; then
    image=$4 layer=$5
    case $image$layer in
        *[!A-Za-z0-9/._@%+=-]*)
            mount -n -c --bind "$image" image && mount -n -c --bind "$layer" layer || exit
            image=image layer=layer
            ;;
    esac
    options=userxattr,lowerdir=$layer:$image${{changes:+,upperdir=$changes/upper,workdir=$changes/work}}
    mount -n -c -i -t overlay -o "$options" overlay {ROOT} || exit
fi
shift 5
cd /
exec "$@"
"""


def preparation(work: Path, size_mb: int, changes: Changes, layers: tuple[Path, Path] | None) -> list[str]:
    """The command's beginning; `layers` are an image and what is laid over it, for a root at ROOT."""
    namespaces = ["unshare", "--user", "--map-current-user", "--keep-caps", "--mount"]
    arguments = [str(work), str(size_mb), _CHANGES[changes], *(map(str, layers) if layers else ("", ""))]
    return [*namespaces, "/bin/sh", "-c", _SCRIPT, "sh", *arguments]


def upper(work: Path, changes: Changes) -> Path:
    """Where the files that were changed are."""
    return work / _CHANGES[changes] / "upper"

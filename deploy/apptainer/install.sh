#!/bin/sh
# Installs a real Apptainer under a prefix of its own, for trying out and testing the platform on Debian 12 and 13.
#
#   deploy/apptainer/install.sh [PREFIX]        default: /opt/prorl-apptainer; the program is PREFIX/bin/apptainer
#
# These Debian releases have no apptainer package, unstable has. Its package is unpacked below the prefix together with the C
# library that it was built for, and runs with that one: no package source, preference or library of the system changes.
# Needs root. Does nothing when the prefix already has a working Apptainer. A cluster has its own installation: use that one.
set -eu
prefix=${1:-/opt/prorl-apptainer}
program=$prefix/bin/apptainer

say() { echo "apptainer: $*"; }
fail() { say "not installed: $*" >&2; exit 1; }

"$program" --version >/dev/null 2>&1 && exit 0
[ "$(id -u)" = 0 ] || fail "this needs root"
command -v apt-get >/dev/null || fail "this is not a Debian system (no apt-get)"
case $(dpkg --print-architecture) in
    amd64) loader=ld-linux-x86-64.so.2 ;;
    arm64) loader=ld-linux-aarch64.so.1 ;;
    *) fail "no package for $(dpkg --print-architecture)" ;;
esac
# Both formats of package sources: `URIs: http://mirror/debian` and `deb [options] http://mirror/debian suite main`.
mirror=$(sed -nE 's/^(URIs:|deb( \[[^]]*\])?) +(https?:[^ ]*\/debian)\/?( .*)?$/\3/p' \
    /etc/apt/sources.list.d/*.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null | head -n 1)
[ -n "$mirror" ] || fail "no Debian mirror in /etc/apt"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$work/log
run() { "$@" >>"$log" 2>&1 || { tail -n 20 "$log" >&2; fail "this failed: $*"; }; }

say "installing Apptainer in $prefix (from $mirror, unstable)"
export DEBIAN_FRONTEND=noninteractive
missing=
for package in patchelf squashfs-tools squashfuse fuse-overlayfs fuse3 uidmap; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $package"
done
if [ -n "$missing" ]; then
    run apt-get -q update
    # shellcheck disable=SC2086
    run apt-get -q install -y --no-install-recommends $missing
fi

# An apt of its own: the machine's sources, preferences and package lists stay as they are. Mirrors of a cluster may lag behind.
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/none" "$work/root"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" >"$work/sources.list"
apt() {
    run apt-get -q -o "Dir::Etc::sourcelist=$work/sources.list" -o "Dir::Etc::sourceparts=$work/none" \
        -o "Dir::Etc::preferencesparts=$work/none" -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" \
        -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Check-Valid-Until=false "$@"
}
cd "$work"
apt update
apt download apptainer libc6 libseccomp2 libsqlite3-0
for package in ./*.deb; do run dpkg -x "$package" root; done

libraries=$(echo root/usr/lib/*-linux-gnu)
[ ! -e "$prefix" ] || [ -d "$prefix/runtime" ] || fail "$prefix is there and is not an installation of this script's"
rm -rf "$prefix"
mkdir -p "$prefix/runtime" "$prefix/lib/${libraries##*/}" "$prefix/var/lib/apptainer/mnt/session" "$prefix/etc"
cp -a root/usr/bin "$prefix/"
cp -a root/etc/apptainer "$prefix/etc/"
cp -a "$libraries/apptainer" "$prefix/lib/${libraries##*/}/"
for library in "$loader" libc.so.6 libm.so.6 libresolv.so.2 libpthread.so.0 libdl.so.2 libseccomp.so.2 libsqlite3.so.0; do
    cp -L "$libraries/$library" "$prefix/runtime/"
done
starter=$(echo "$prefix"/lib/*-linux-gnu/apptainer/bin/starter)
for binary in "$program" "$starter"; do
    run patchelf --set-interpreter "$prefix/runtime/$loader" --set-rpath "$prefix/runtime" --force-rpath "$binary"
done
# The starter looks for these one level too low, as Debian's library directories are one level deeper than others'.
ln -s ../etc "$prefix/lib/etc"
ln -s ../var "$prefix/lib/var"
ln -sfn apptainer "$prefix/bin/singularity"
chmod -R a+rX "$prefix"
# Where systemd is not process 1, and where root lacks capabilities itself, root could start nothing.
sed -i 's/^systemd cgroups = yes/systemd cgroups = no/; s/^root default capabilities = full/root default capabilities = no/' \
    "$prefix/etc/apptainer/apptainer.conf"
"$program" --version >/dev/null 2>>"$log" || { tail -n 20 "$log" >&2; fail "$program does not run"; }
say "$("$program" --version)"

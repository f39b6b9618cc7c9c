#!/bin/sh
# Installs the Debian packages and the Apptainer that some tests need, and opens /dev/fuse to the users that tests run as.
# Without root it says what is missing, and the tests that need it say so too.
set -eu
PATH=$PATH:/usr/sbin:/sbin
missing=
[ -x /usr/sbin/rabbitmq-server ] || missing="$missing rabbitmq-server"
[ -x /usr/bin/chromium ] || missing="$missing chromium fonts-dejavu-core"
[ -x /usr/bin/python3 ] || missing="$missing python3"
[ -x /usr/bin/curl ] || missing="$missing curl"
# The program that Playwright drives browsers with is linked to it; a minimal Debian lacks it.
ldconfig -p | grep -q 'libatomic\.so\.1' || missing="$missing libatomic1"
# Image files are mounted and made with these, root file systems from packages with the last.
[ -x /usr/bin/squashfuse ] || missing="$missing squashfuse fuse3"
[ -x /usr/bin/mksquashfs ] || missing="$missing squashfs-tools"
[ -x /usr/bin/mmdebstrap ] || missing="$missing mmdebstrap"

if [ -z "$missing" ]; then
    :
elif [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests: not root, so these are not installed:$missing. The tests that need them will be skipped."
else
    echo "tests: installing$missing"
    log=$(mktemp)
    if apt-get -q update >"$log" 2>&1 &&
        DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends $missing >>"$log" 2>&1; then
        rm -f "$log"
    else
        tail -n 20 "$log"
        echo "tests: could not install$missing (all output is in $log). The tests that need them will be skipped."
    fi
fi

"$(dirname "$0")/apptainer/install.sh" || echo "tests: the tests that need Apptainer will be skipped."
if [ "$(id -u)" = 0 ]; then
    # Apptainer refuses users without an account; tests/conformance knows the number.
    getent passwd 54321 >/dev/null || useradd --no-create-home --uid 54321 --shell /usr/sbin/nologin prorl-test
    [ ! -c /dev/fuse ] || chmod 666 /dev/fuse
fi

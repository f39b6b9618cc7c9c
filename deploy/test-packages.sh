#!/bin/sh
# Installs the Debian packages that some tests need. Without root it says what is missing, and the tests that need it say so too.
set -eu
PATH=$PATH:/usr/sbin:/sbin
missing=
[ -x /usr/sbin/rabbitmq-server ] || missing="$missing rabbitmq-server"
[ -x /usr/bin/chromium ] || missing="$missing chromium fonts-dejavu-core"
[ -x /usr/bin/python3 ] || missing="$missing python3"
# The program that Playwright drives browsers with is linked to it; a minimal Debian lacks it.
ldconfig -p | grep -q 'libatomic\.so\.1' || missing="$missing libatomic1"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests: not root, so these are not installed:$missing. The tests that need them will be skipped."
    exit 0
fi
echo "tests: installing$missing"
log=$(mktemp)
if apt-get -q update >"$log" 2>&1 &&
    DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends $missing >>"$log" 2>&1; then
    rm -f "$log"
else
    tail -n 20 "$log"
    echo "tests: could not install$missing (all output is in $log). The tests that need them will be skipped."
fi

#!/bin/sh
# Makes the virtual environment .venv with this project in it. Needs nothing but a Python >= 3.11.
#
#   deploy/bootstrap.sh [EXTRA]      EXTRA: an optional dependency group of pyproject.toml, such as `test`
#
# Does nothing when .venv is already as pyproject.toml wants it. Set PYTHON to choose the interpreter.
set -eu
cd "$(dirname "$0")/.."
extra=${1:-}
log=var/log/bootstrap.log
stamp=.venv/bootstrap.stamp
packages=".${extra:+[$extra]}"

say() { echo "bootstrap: $*"; }
fail() { say "$*" >&2; exit 1; }

# The folder is part of it since a virtual environment cannot be moved.
wanted=$(cat pyproject.toml - <<END | sha256sum | cut -d ' ' -f 1
$(pwd)
END
)

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

works() { [ -x .venv/bin/python ] && .venv/bin/python -c '' 2>/dev/null; }

# Without an EXTRA, an environment that was made with one will do.
up_to_date() {
    if [ -n "$extra" ]; then
        grep -qxF "$wanted $packages" "$stamp"
    else
        grep -q "^$wanted " "$stamp"
    fi 2>/dev/null
}

find_python() {
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
        if new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or newer (looked for python3, python3.13, python3.12, python3.11). Install one, or set PYTHON."
}

run() { "$@" >>"$log" 2>&1 || { tail -n 20 "$log" >&2; fail "failed: $* (all output is in $log)"; }; }

# Debian ships Python without ensurepip, which `python3 -m venv` needs.
make_environment() {
    package="$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    if ! "$python" -c 'import ensurepip' 2>/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing the system package $package"
        run apt-get -q update
        run env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "$package"
    fi
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        run "$python" -m venv --clear .venv
    elif "$python" -m virtualenv --version >/dev/null 2>&1; then
        run "$python" -m virtualenv --clear .venv
    elif command -v virtualenv >/dev/null; then
        run virtualenv --clear --python "$python" .venv
    elif command -v uv >/dev/null; then
        run uv venv --clear --seed --python "$python" .venv
    else
        fail "$python cannot make virtual environments. As root: apt-get install $package. Then run this again."
    fi
}

works && up_to_date && exit 0

mkdir -p var/log
: >"$log"
if ! { works && grep -qxF "$(pwd)" "$stamp" 2>/dev/null; }; then
    python=$(find_python)
    say "making .venv with $python"
    make_environment
    pwd >"$stamp"
fi
say "installing $packages and what it needs (about half a minute the first time)"
run .venv/bin/python -m pip install --disable-pip-version-check --editable "$packages"
printf '%s\n%s\n' "$(pwd)" "$wanted $packages" >"$stamp"
say "done"

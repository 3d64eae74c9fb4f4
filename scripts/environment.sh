# Sourced by the scripts beside it, with $root set: makes and keeps their Python environments.
#
# An environment lies in .venvs/ of the repository or, for a user who cannot write there, in the
# user's cache folder. The file `ready` in it is written last and holds a checksum of all that it
# was made from: an interrupted or outdated environment is made anew.
# shellcheck shell=sh

# The environments hold all that is needed: what a shell adds to Python's path would only mix in.
# Tests start hundreds of processes: without bytecode each would compile the package anew.
unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE

die() {
    echo "ringcoll: $*" >&2
    exit 1
}

# environment NAME PIP_ARGUMENT...: sets $python to the interpreter of an environment NAME that has
# what `pip install PIP_ARGUMENT...` installs, run in the repository.
environment() {
    name=$1
    shift
    wanted=$(printf '%s\n' "$root" "$*" | cat - "$root/pyproject.toml" \
        "$root/scripts/environment.sh" | cksum)
    for folder in shared own temporary; do
        place "$folder" && is_ready && return
    done
    base_python=$(find_python) || exit 1
    for folder in shared own temporary; do
        place "$folder" && make_folder "$folder" || continue
        lock
        is_ready || make_environment "$@"
        exec 9>&-
        return
    done
    die "no folder to make a Python environment in: $root/.venvs, the cache folder and" \
        "${TMPDIR:-/tmp} cannot be written"
}

# dev_environment: the one of the tests and checks; all scripts name it alike, or it would be made
# anew each time.
dev_environment() {
    cuda=$(cuda_extra)
    set -- --editable ".[${cuda:-cu13}]" --group dev
    has_compiler || set -- "$@" --group compiler
    environment dev "$@"
}

# torch_environment VERSION: one with that release of torch, such as 2.13, or with the newest that
# there was when it was made. The one of CI is named by pyproject.toml.
torch_environment() {
    cuda=$(cuda_extra)
    set -- "$1" --editable ".${cuda:+[$cuda]}"
    case $1 in
        2.13) shift && environment torch "$@" --group torch ;;
        newest) shift && environment torch-newest "$@" --group torch-suite torch ;;
        *)
            release=$1
            shift && environment "torch-$release" "$@" --group torch-suite "torch==$release.*"
            ;;
    esac
}

# compiled_part: builds the package's compiled part in the checkout for the Python of the
# environment, if its source has changed since, by the compiler at hand.
compiled_part() {
    has_compiler || export CC="$python -m ziglang cc" LDSHARED="$python -m ziglang cc -shared"
    "$python" scripts/build_hook.py >/dev/null ||
        echo "ringcoll: without the compiled part, whose tests are skipped" >&2
}

# The kernels are tested on the CPU too, where a C++ compiler builds them; the compiled part is C.
has_compiler() {
    { command -v g++ || command -v clang++ || command -v c++; } >/dev/null &&
        { command -v gcc || command -v clang || command -v cc; } >/dev/null
}

# place shared|own|temporary: sets $base, $env and $python; fails where somebody else could have
# prepared what this user is about to run.
place() {
    this=$(printf '%s' "$root" | cksum | cut -d ' ' -f 1)
    case $1 in
        shared) base=$root/.venvs ;;
        own) base=${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/ringcoll/venvs/$this ;;
        temporary)
            private=${TMPDIR:-/tmp}/ringcoll-$(id -u)
            [ ! -e "$private" ] || is_private || return 1
            base=$private/$this
            ;;
    esac
    env=$base/$name
    python=$env/bin/python
}

is_private() {
    [ -d "$private" ] && [ ! -L "$private" ] && [ -O "$private" ]
}

is_ready() {
    [ "$(cat "$env/ready" 2>/dev/null)" = "$wanted" ] && "$python" -I -c 'import pip' 2>/dev/null
}

# make_folder shared|own|temporary: after `place` of the same.
make_folder() {
    if [ "$1" = temporary ]; then
        mkdir -m 700 "$private" 2>/dev/null
        is_private || return 1
    fi
    mkdir -p "$base" 2>/dev/null && [ -w "$base" ] || return 1
    # An outdated environment of another user (root ran first) may be in the way for good.
    [ ! -e "$env" ] || [ -O "$env" ] || [ "$(id -u)" = 0 ] || return 1
    (: >>"$env.lock") 2>/dev/null
}

# One at a time: descriptor 9 holds the lock until it is closed, however this script ends.
lock() {
    exec 9>>"$env.lock"
    "$base_python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
}

find_python() {
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "needs Python 3.10 or newer with its venv module, as python3 on the PATH"
}

make_environment() {
    echo "ringcoll: making the Python environment $env (once)" >&2
    rm -rf "$env"
    # A user-wide configuration of pip must not turn it away from the environment.
    (
        cd "$root"
        export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_DISABLE_PIP_VERSION_CHECK=1
        make_pip && "$python" -m pip install -qq --no-compile "$@"
    ) || die "could not install $*; what pip says stands above. Try again when it is mended"
    compile_modules
    echo "$wanted" >"$env/ready"
}

# As pip does, but on all cores; a file that is no Python of this version is left as it is.
compile_modules() {
    "$python" -m compileall -q -j 0 -x '/tests?/' "$(site_folder)" >/dev/null 2>&1 || :
}

site_folder() {
    "$python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# Distributions split ensurepip off, and their own pip refuses to install anywhere but with
# --target. Dependency groups need pip 25.1.
make_pip() {
    if ! "$base_python" -m venv "$env" >/dev/null 2>&1; then
        "$base_python" -m venv --clear --without-pip "$env" || return 1
        "$base_python" -m pip install -qq --target "$(site_folder)" 'pip>=25.1' ||
            die "python3 has neither ensurepip nor pip: install the package python3-venv"
    fi
    "$python" -m pip install -qq --upgrade 'pip>=25.1'
}

# cuda_extra: prints the extra that fits the NVIDIA driver, nothing where there is no driver.
cuda_extra() {
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
    case $driver in
        [0-9]*.*) ;;
        *)
            # The first number with a point is the driver's; a container without devices sees the
            # file too, but can do nothing with the driver.
            [ -e /dev/nvidiactl ] || return 0
            driver=$(tr -s ' \t' '\n\n' 2>/dev/null </proc/driver/nvidia/version |
                grep -m 1 '^[0-9][0-9]*\.[0-9]') || return 0
            ;;
    esac
    # CUDA 13 came with driver 580.
    if [ "${driver%%.*}" -ge 580 ]; then echo cu13; else echo cu12; fi
}

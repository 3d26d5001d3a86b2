# Sourced by scripts/run and scripts/test: finds a Python, makes a virtual environment
# and installs the checkout into it. Needs bash 3.2 and nothing else.

export PIP_DISABLE_PIP_VERSION_CHECK=1

is_supported='import sys; sys.exit(sys.version_info < (3, 11))'

say() { printf '%s\n' "$*"; }

fail() {
  printf '%s\n' "$*" >&2
  exit 1
}

# Stops unless the links to the rooms are links: a checkout made without symbolic
# links holds small text files in their place.
require_links() {
  local room
  for room in planner meshes models; do
    [ -d "$root/whalejax/$room" ] || fail \
      "whalejax/$room is not a link to the folder $room: this checkout was made" \
      "without symbolic links. Run 'git config core.symlinks true', then" \
      "'git checkout -- whalejax'. (On Windows, turn on developer mode first.)"
  done
}

# Prints the interpreter to make environments with: $PYTHON, or the first supported.
find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    "$PYTHON" -c "$is_supported" 2>/dev/null || fail \
      "PYTHON=$PYTHON is $(version_of "$PYTHON"); Python 3.11 or later is needed."
    say "$PYTHON"
    return
  fi
  for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c "$is_supported" 2>/dev/null; then
      say "$candidate"
      return
    fi
  done
  fail "Python 3.11 or later is needed; python3 is $(version_of python3)." \
    "Install one, or name it: PYTHON=/path/to/python3.11 $0"
}

version_of() {
  "$1" -c 'import platform; print("Python", platform.python_version())' 2>/dev/null ||
    say "missing or does not run"
}

# make_environment DIRECTORY PYTHON "KIND..." REQUIREMENT...
# Makes DIRECTORY if need be and installs the requirements, held to the known-good
# versions of requirements/ where there is a file for the interpreter. Does nothing when
# the first KIND was installed there from the same pyproject.toml; the further kinds are
# those that this installation serves as well.
make_environment() {
  local directory=$1 base=$2 kinds=$3 python=$1/bin/python log=$1/install.log
  local kind tag locked state
  shift 3
  if ! "$python" -c "$is_supported; import pip" >/dev/null 2>&1; then
    "$base" -c 'import ensurepip, venv' 2>/dev/null || fail \
      "$base ($(version_of "$base")) cannot make virtual environments: its venv or" \
      "ensurepip module is missing. On Debian and Ubuntu: apt install python3-venv"
    say "making $directory with $(version_of "$base")"
    "$base" -m venv "$directory" || fail "could not make $directory"
    "$python" -c "$is_supported; import pip" >/dev/null 2>&1 || fail \
      "$directory holds $(version_of "$python"), without pip or older than 3.11." \
      "Remove that folder and run this again."
  fi
  tag=$("$python" -c 'import sys; print("py%d%d" % sys.version_info[:2])')
  locked=$root/requirements/ci-$tag.txt
  [ -f "$locked" ] || locked=/dev/null
  state=$(cat "$root/pyproject.toml" "$locked" - <<<"$root $tag" | digest "$python")
  [ "$(cat "$directory/.installed-${kinds%% *}" 2>/dev/null)" != "$state" ] || return 0
  say "installing $* into $directory (the first time takes minutes; log: $log)"
  if ! (cd "$root" && "$python" -m pip install --no-input --no-compile -c "$locked" "$@") \
    >"$log" 2>&1 </dev/null; then
    tail -n 20 "$log" >&2
    fail "the installation failed; the whole log is $log"
  fi
  # pip would compile on one core. Some packages hold templates that do not compile.
  "$python" -m compileall -q -j 0 "$directory/lib" >>"$log" 2>&1 </dev/null || :
  for kind in $kinds; do say "$state" >"$directory/.installed-$kind"; done
}

digest() {
  "$1" -c 'import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

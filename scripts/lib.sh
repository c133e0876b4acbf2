# Shared by the scripts beside it: find a Python, make an environment. To be sourced; it does nothing by itself.
# Kept to what bash 3.2 knows (macOS). What a function hands back is on its stdout, what a person reads on stderr.

FLEX_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
FLEX_VENVS=${FLEX_VENVS:-$FLEX_ROOT/.venvs}
FLEX_MEGATRON=0.19.2     # the megatron-core that counts
FLEX_EXTRAS=megatron,fairscale,deepspeed,huggingface,cli,launch,patches,zarr,datasets,plot # what its environment has: one string, as all scripts share it
FLEX_NEWEST_PYTHON=3.13  # the newest Python that it has wheels for

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

probe_python() { # COMMAND -> "MINOR PATH" of a Python 3 that can make environments; fails otherwise
  "$1" -c '
import sys, sysconfig
import ensurepip, venv
if sys.version_info[0] != 3 or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
print(sys.version_info[1], sys.executable)' 2>/dev/null </dev/null
}

python_candidates() { # MINOR -> commands and paths that may be Python 3.MINOR, one per line
  local root=${PYENV_ROOT:-${HOME:-}/.pyenv} path
  printf '%s\n' "python3.$1" python3 python
  if command -v uv >/dev/null; then
    UV_PYTHON_DOWNLOADS=never uv python find "3.$1" 2>/dev/null || true
  fi
  if command -v pyenv >/dev/null; then
    root=$(pyenv root)
  fi
  for path in "$root/versions/3.$1"*/bin/python; do
    if [ -x "$path" ]; then printf '%s\n' "$path"; fi
  done
}

find_python() { # MIN [MAX], such as 3.12 3.13 -> path of a Python from MIN to MAX, the oldest of them that is there
  local min=$1 max=${2:-$FLEX_NEWEST_PYTHON} wanted candidate found minor
  wanted="Python $min"
  if [ "$min" != "$max" ]; then wanted="$wanted to $max"; fi

  if [ -n "${FLEX_PYTHON:-}" ]; then
    found=$(probe_python "$FLEX_PYTHON") ||
      die "FLEX_PYTHON=$FLEX_PYTHON is no Python that runs and can make environments (module venv): name another or unset it"
    minor=${found%% *}
    if [ "$minor" -lt "${min#3.}" ] || [ "$minor" -gt "${max#3.}" ]; then
      die "FLEX_PYTHON=$FLEX_PYTHON is Python 3.$minor and this needs $wanted: name another or unset it"
    fi
    printf '%s\n' "${found#* }"
    return
  fi

  minor=${min#3.}
  while [ "$minor" -le "${max#3.}" ]; do
    while IFS= read -r candidate; do
      if found=$(probe_python "$candidate") && [ "${found%% *}" = "$minor" ]; then
        printf '%s\n' "${found#* }"
        return
      fi
    done <<<"$(python_candidates "$minor")"
    minor=$((minor + 1))
  done
  die "no $wanted with the venv module found (looked for python3.x, python3, python, uv's and pyenv's): install one," \
    "for example 'uv python install $min' or 'apt install python$min-venv', or set FLEX_PYTHON to its path"
}

hash_of() { # PYTHON WORD... -> hash of the words, of that Python, and of every WORD of the form @FILE its contents
  "$1" - "${@:2}" <<'PY'
import hashlib, os, pathlib, sys
digest = hashlib.sha256(repr((sys.version, os.path.realpath(sys.executable))).encode())
for word in sys.argv[1:]:
    digest.update(b"\0" + (pathlib.Path(word[1:]).read_bytes() if word[0] == "@" else word.encode()))
print(digest.hexdigest())
PY
}

make_venv() { # NAME PYTHON EXTRAS GROUP [REQUIREMENT...] -> path of the environment's Python
  # Installs this repository (editable) with those extras, such as megatron,cli, and a dependency group. Does nothing where a stamp says that
  # the same was installed before; a new Python or a half-made environment starts afresh; anything else, such as another
  # checkout that has the same FLEX_VENVS, is installed on top.
  local name=$1 python=$2 extras=$3 group=$4
  shift 4
  local dir=$FLEX_VENVS/$name base want began=$SECONDS
  mkdir -p "$FLEX_VENVS"
  exec 9>"$FLEX_VENVS/$name.lock"
  "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' # held by descriptor 9: a second run waits for the first

  base=$(hash_of "$python" "$dir")
  want="$base $(hash_of "$python" "$FLEX_ROOT" "$extras" "$group" "$@" "@$FLEX_ROOT/pyproject.toml" "@$FLEX_ROOT/megatron_flex/version.py" \
    "@$FLEX_ROOT/scripts/constraints.txt")"
  if ! [ -x "$dir/bin/python" ] || [ "$(cut -d' ' -f1 "$dir/flex-stamp" 2>/dev/null)" != "$base" ]; then
    say "making the environment $name with $python …"
    "$python" -m venv --clear "$dir" || die "cannot make an environment in $dir (see above)"
    say "installing torch and what belongs to megatron_flex[$extras] $* (about two minutes) …"
  elif [ "$(cat "$dir/flex-stamp")" != "$want" ]; then
    say "requirements changed: updating the environment $name …"
  fi
  if [ "$(cat "$dir/flex-stamp" 2>/dev/null)" != "$want" ]; then
    rm -f "$dir/flex-stamp"
    if ! { # dependency groups came with pip 25.1
      "$dir/bin/python" -m pip install --no-input --progress-bar off --disable-pip-version-check "pip>=25.1" &&
        "$dir/bin/python" -m pip install --no-input --progress-bar off --disable-pip-version-check \
          --constraint "$FLEX_ROOT/scripts/constraints.txt" --editable "${FLEX_ROOT}[${extras}]" \
          --group "$FLEX_ROOT/pyproject.toml:$group" "$@"
    } >"$dir/pip.log" 2>&1 </dev/null; then
      printf '%s\n' "$base" >"$dir/flex-stamp" # pip gave up in good order: the next run goes on from here
      grep -v '^WARNING' "$dir/pip.log" | tail -n 12 >&2
      die "pip could not install into the environment $name: read the lines above, or all of $dir/pip.log"
    fi
    printf '%s\n' "$want" >"$dir/flex-stamp"
    say "environment $name is ready ($((SECONDS - began)) s)"
  fi
  exec 9>&-
  printf '%s\n' "$dir/bin/python"
}

find_browser() { # -> path of a Chromium or Chrome, or of what FLEX_BROWSER names; fails where there is none
  local name
  if [ -n "${FLEX_BROWSER:-}" ]; then
    command -v "$FLEX_BROWSER"
    return
  fi
  for name in chromium chromium-browser google-chrome google-chrome-stable chrome; do
    if command -v "$name"; then return; fi
  done
  return 1
}

get_browser() { # the same; where there is none, Debian's Chromium, if that can be installed without asking
  local as_root=env
  if find_browser; then return; fi
  if [ -n "${FLEX_BROWSER:-}" ] || ! command -v apt-get >/dev/null; then return 1; fi
  if [ "$(id -u)" != 0 ]; then as_root="sudo -n env"; fi
  # shellcheck disable=SC2086 # several words
  {
    $as_root DEBIAN_FRONTEND=noninteractive timeout 120 apt-get update -q -o Acquire::Retries=1 &&
      $as_root DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -q -y --no-install-recommends \
        -o DPkg::Lock::Timeout=60 chromium
  } >/dev/null 2>&1 </dev/null || return 1
  find_browser
}

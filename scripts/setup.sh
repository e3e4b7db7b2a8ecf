#!/bin/bash
# setup.sh "missing packages" "those of them without which nothing works": installs them, or says which to install.
set -u
missing=$1 needed=$2
[ -n "$missing" ] || { echo "setup: all packages are installed"; exit 0; }
as_root=
[ "$(id -u)" = 0 ] || as_root=sudo
if command -v apt-get >/dev/null && { [ -z "$as_root" ] || sudo -n true 2>/dev/null; }; then
  echo "setup: installing $missing"
  $as_root apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null && exit 0
  echo "setup: apt-get could not install them"
fi
if [ -n "$needed" ]; then
  echo "setup: please install these packages and try again:  $missing"
  echo "       on Debian and Ubuntu:  sudo apt-get install $missing"
  exit 1
fi
echo "setup: without $missing, ranks will be threads instead of processes"

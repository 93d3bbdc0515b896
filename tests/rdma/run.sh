#!/usr/bin/env bash
# Runs the tests of the path nixl over RDMA where no RDMA NIC is: inside a guest whose kernel has soft-RoCE.
#
#   tests/rdma/run.sh                 boots the guest, runs tests/rdma/job.sh in it, prints what it says
#   TOWLINE_RDMA_SECONDS=3600         how long that may take; three minutes on two idle cores
#
# The guest sees this machine's files read-only, with a layer of its own on top, so that it runs the very binaries that
# cargo has built here. Its kernel and user tools come as Debian packages, which are unpacked and not installed. Exits
# with 75 and the reason on its last line where the machine lacks what that needs.
set -euo pipefail
cd "$(dirname "$0")/../.."

work=${CARGO_TARGET_DIR:-target}/rdma
limit=${TOWLINE_RDMA_SECONDS:-3600}
layer_packages=(ibverbs-providers libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 iproute2 rdma-core ethtool)
modules=(virtio_pci 9pnet_virtio 9p overlay veth ib_uverbs rdma_ucm rdma_rxe crc32_generic crc32c_generic)

lacking() {
  echo "cannot run here: $1"
  exit 75
}

[[ $(uname -m) == x86_64 ]] || lacking "the guest is an x86-64 machine, and this is $(uname -m)"
if ! command -v qemu-system-x86_64 >/dev/null || ! command -v busybox >/dev/null || ! command -v cpio >/dev/null; then
  if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    lacking "QEMU, busybox or cpio is missing (apt-get install qemu-system-x86 busybox-static cpio)"
  fi
  timeout 600 apt-get install -y --no-install-recommends qemu-system-x86 busybox-static cpio >&2 ||
    lacking "'apt-get install qemu-system-x86 busybox-static cpio' failed"
fi
command -v apt-get >/dev/null || lacking "its kernel comes as a Debian package, and there is no apt-get"

mkdir -p "$work"/{debs,layer,kernel,share}
work=$(realpath "$work")

# ---- the guest's kernel and tools -------------------------------------------------------------------------

fetch() {
  local package missing=()
  for package in "$@"; do
    compgen -G "$work/debs/${package}_*.deb" >/dev/null || missing+=("$package")
  done
  ((${#missing[@]} == 0)) || (cd "$work/debs" && apt-get download -q "${missing[@]}" >&2)
}

# The cloud kernels have no soft-RoCE; the plain one does.
kernel=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image/ { print $2; exit }')
[[ -n $kernel ]] || lacking "there is no package linux-image-amd64 (apt-get update?)"
fetch "$kernel" "${layer_packages[@]}" || lacking "'apt-get download' failed"

if [[ ! -e $work/kernel/ready-$kernel ]]; then
  rm -rf "$work/kernel" "$work/layer"
  mkdir -p "$work/kernel" "$work/layer/usr/"{bin,sbin,lib}
  dpkg -x "$work/debs/$kernel"_*.deb "$work/kernel"
  # A layer with a folder where the system has a link would hide what is below it.
  for name in bin sbin lib; do ln -s "usr/$name" "$work/layer/$name"; done
  for package in "${layer_packages[@]}"; do
    dpkg --fsys-tarfile "$work/debs/${package}"_*.deb | tar -x --keep-directory-symlink -C "$work/layer"
  done
  # An upgrade of the package leaves the old modules where they are.
  version=$(basename "$work"/kernel/lib/modules/*)
  busybox depmod -b "$work/kernel" "$version"
  touch "$work/kernel/ready-$kernel"
fi

# A module after those that it needs.
version=$(basename "$work"/kernel/lib/modules/*)
in_order() {
  local name=$1 line
  line=$(grep -E "(^|/)${name//_/[-_]}\.ko(\.xz)?:" "$work/kernel/lib/modules/$version/modules.dep" | head -n 1) || return 0
  # depmod names the nearest last.
  for needed in ${line#*:}; do echo "$needed"; done | tac
  echo "${line%%:*}"
}

root=$work/initramfs
rm -rf "$root"
mkdir -p "$root"/{bin,modules,proc,sys,dev,host,layer,own,root}
cp "$(command -v busybox)" "$root/bin/busybox"
for module in "${modules[@]}"; do in_order "$module"; done | awk '!seen[$0]++' | while read -r path; do
  path=${path#/}
  file=$work/kernel/lib/modules/$version/${path#lib/modules/"$version"/}
  name=$(basename "${file%.xz}")
  if [[ $file == *.xz ]]; then xz -dc "$file" >"$root/modules/$name"; else cp "$file" "$root/modules/$name"; fi
  echo "$name"
done >"$root/modules/order"
install -m 755 tests/rdma/init "$root/init"
(cd "$root" && find . -print0 | cpio --null --create --format=newc --quiet) >"$work/initramfs.img"

# ---- the run ----------------------------------------------------------------------------------------------

rm -f "$work"/share/{said,status}
{
  printf 'cd %q\n' "$PWD"
  for name in TOWLINE_RDMA_LAWS TOWLINE_RDMA_WORKER TOWLINE_RDMA_TESTS VIRTUAL_ENV; do
    printf 'export %s=%q\n' "$name" "${!name:-}"
  done
  cat tests/rdma/job.sh
} >"$work/share/job.sh"

folder() { echo -fsdev "local,id=$1,path=$2,security_model=none,multidevs=remap$3" -device "virtio-9p-pci,fsdev=$1,mount_tag=$1"; }
boot() {
  status=0
  rm -f "$work/console.log"
  # shellcheck disable=SC2046 # words are meant
  timeout -k 5 "$limit" nice qemu-system-x86_64 -nodefaults -no-reboot -display none -machine q35 -accel "$1" \
    -cpu "$2" -smp "$(nproc)" -m 3072 -kernel "$work"/kernel/boot/vmlinuz-* -initrd "$work/initramfs.img" \
    $(folder host / ,readonly=on) $(folder layer "$work/layer" ,readonly=on) $(folder share "$work/share" "") \
    -serial "file:$work/console.log" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on" </dev/null >"$work/qemu.log" 2>&1 || status=$?
}
# Emulation works everywhere. Inside another virtual machine the processor's help is often there and hangs, so it is used only
# where somebody says so.
if [[ -n ${TOWLINE_RDMA_KVM:-} ]]; then boot kvm host; else boot tcg,thread=multi max,la57=off; fi

cat "$work/share/said" 2>/dev/null || true
if [[ ! -e $work/share/status ]]; then
  tail -n 20 "$work/qemu.log" "$work/console.log" >&2 || true
  echo "the guest did not finish within $limit s (QEMU: $status); see $work/console.log"
  exit 1
fi
exit "$(cat "$work/share/status")"

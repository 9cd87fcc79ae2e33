#!/usr/bin/env bash
# The real programs the tests talk to: installed, started and listed. Debian, root; safe to run again at any time.
#
#   tests/services.sh install [NAME…]   docker apptainer singularity buildah podman registry slurm gridengine oar browser
#                                       modules emulation (these when none is named) peers
#   tests/services.sh start [NAME…]     docker registry slurm gridengine oar (these when none is named)
#   tests/services.sh env               what is there, one line each
set -euo pipefail
umask 022                                        # what is installed here is for every user, whoever calls

# shellcheck source=/dev/null
RELEASE=$(. /etc/os-release && echo "${VERSION_CODENAME:-} $PRETTY_NAME")
readonly USER_NAME=builder                       # the ordinary user of the rootless tests
readonly COLLEAGUE=colleague LAB=ekiben-lab      # a second one, and the group of both
readonly LIBS=/opt/apptainer-libs                # a newer glibc that only apptainer sees
readonly SINGULARITY=/opt/singularity-ce         # not on PATH: what finds it there takes it for the machine's runtime
readonly MODULES=/opt/ekiben-modules             # Environment Modules and Lmod
readonly SINGULARITY_DEB=pool/universe/s/singularity-container/singularity-container_4.1.1+ds2-1build1_amd64.deb
readonly SINGULARITY_SHA256=cb2e67f0f6897a78dd201b86c06575ba3f49144011952754b8633c7b1ab6d4b4
readonly LOGS=${EKIBEN_SERVICES_LOGS:-/var/log}
readonly REGISTRY=127.0.0.1:${EKIBEN_REGISTRY_PORT:-5000}
readonly REGISTRY_HOME=/var/lib/ekiben-test-registry
readonly SLURM_HOME=/var/lib/ekiben-test-slurm
readonly OAR_HOME=/var/lib/ekiben-test-oar OAR_DATABASE_PORT=${EKIBEN_OAR_PORT:-5439}
readonly GE_HOME=/var/lib/ekiben-test-gridengine
readonly GE_COMMON=/var/lib/gridengine/default/common
export DEBIAN_FRONTEND=noninteractive
export LC_ALL=C.UTF-8

say() { printf 'services: %s\n' "$*" >&2; }
die() { say "$1"; exit "${2:-1}"; }
has() { command -v "$1" >/dev/null 2>&1; }

packages() {
    case $1 in
        # Rootless work in general; every group gets these.
        base) echo ca-certificates gnupg uidmap fuse-overlayfs fuse2fs squashfuse squashfs-tools xfsprogs zstd mmdebstrap debootstrap curl shellcheck iproute2 procps openssl git gcc libc6-dev ;;
        docker) echo docker.io docker-compose iptables ;;
        apptainer | singularity) ;;              # see install_apptainer, install_singularity
        buildah) echo buildah crun runc ;;
        podman) echo podman crun runc slirp4netns catatonit ;;
        registry) echo docker-registry apache2-utils skopeo ;;
        slurm) echo slurm-wlm slurmctld slurmd slurm-client munge ;;
        gridengine) echo gridengine-master gridengine-exec gridengine-client ;;
        oar) echo oar-server oar-server-pgsql oar-user oar-user-pgsql oar-node postgresql libjson-perl ;;
        # What the two themselves need; see install_modules.
        modules) echo less tcl8.6 libtcl8.6 tcl lua5.3 lua-filesystem lua-json lua-posix lua-term ;;
        peers) echo charliecloud podman skopeo umoci ;;
        browser) echo chromium ;;
        emulation) echo qemu-user-static binfmt-support ;;  # programs for arm64; see install_emulation
        *) die "unknown group '$1'; known: docker apptainer singularity buildah podman registry slurm gridengine oar browser modules emulation peers" 2 ;;
    esac
}

has_candidate() { LC_ALL=C apt-cache policy "$1" | grep -q 'Candidate: [^(]'; }

is_installed() { dpkg-query -W -f '${db:Status-Status}\n' "$1" 2>/dev/null | grep -qx installed; }

install() {
    local group wanted="" groups=("$@")
    [ ${#groups[@]} -gt 0 ] || groups=(docker apptainer singularity buildah podman registry slurm gridengine oar browser modules emulation)
    has apt-get || die "needs apt-get: this script knows Debian and its relatives only" 4
    [ "$(id -u)" = 0 ] || die "needs root: sudo tests/services.sh install ${groups[*]}" 4
    for group in base "${groups[@]}"; do
        wanted+=" $(packages "$group")"
    done
    case " ${groups[*]} " in *" gridengine "*) preseed_gridengine ;; esac
    # shellcheck disable=SC2086
    apt_install $wanted
    make_user
    open_fuse
    for group in "${groups[@]}"; do
        case $group in apptainer | singularity | modules | emulation) "install_$group" ;; esac
    done
}

apt_install() {
    local package missing=()
    for package in "$@"; do
        is_installed "$package" || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing ${missing[*]}"
    fresh_lists
    quietly apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${missing[@]}"
}

fresh_lists() {
    [ -n "${lists_are_fresh:-}" ] || quietly apt-get update
    lists_are_fresh=1
}

# A line of output per step is enough, unless the step fails: then all of it.
quietly() {
    local log
    log=$(mktemp)
    "$@" >"$log" 2>&1 || { cat "$log" >&2; rm -f "$log"; die "failed: $*"; }
    rm -f "$log"
}

make_user() {
    id "$USER_NAME" >/dev/null 2>&1 || { say "adding the user $USER_NAME"; useradd -m -s /bin/bash "$USER_NAME"; }
    id "$COLLEAGUE" >/dev/null 2>&1 || useradd -m -s /bin/bash "$COLLEAGUE"
    groupadd --force "$LAB"
    usermod -aG "$LAB" "$USER_NAME"
    usermod -aG "$LAB" "$COLLEAGUE"
    # useradd gives ranges only where the files exist already.
    grep -q "^$USER_NAME:" /etc/subuid 2>/dev/null || usermod --add-subuids "$(free_range /etc/subuid)" "$USER_NAME"
    grep -q "^$USER_NAME:" /etc/subgid 2>/dev/null || usermod --add-subgids "$(free_range /etc/subgid)" "$USER_NAME"
}

free_range() {
    touch "$1"
    awk -F: 'BEGIN { top = 100000 } $2 + $3 > top { top = $2 + $3 } END { print top "-" top + 65535 }' "$1"
}

# udev does this on an ordinary machine; a bare container or VM has 0600.
open_fuse() {
    [ -e /dev/fuse ] || mknod /dev/fuse c 10 229 2>/dev/null || say "no /dev/fuse: rootless mounts will fail"
    [ ! -e /dev/fuse ] || chmod 666 /dev/fuse
}

# Where no init mounts the kernel's table of interpreters, the package found none to write itself into.
install_emulation() {
    local binfmt=/proc/sys/fs/binfmt_misc
    [ -e $binfmt/status ] || mount -t binfmt_misc none $binfmt 2>/dev/null || { say "binfmt_misc cannot be mounted: no emulation"; return 0; }
    [ -e $binfmt/qemu-aarch64 ] || [ "$(uname -m)" = aarch64 ] || quietly update-binfmts --enable qemu-aarch64
}

install_apptainer() {
    if ! has apptainer; then
        fresh_lists
        if has_candidate apptainer; then apt_install apptainer; else install_apptainer_from_sid; fi
    fi
    allow_root_without_sys_resource apptainer /etc/apptainer/apptainer.conf
}

# Debian has Apptainer in sid only, built for a newer glibc than a stable release has. Its own glibc goes into a folder
# of its own, and the two programs are told to look there.
install_apptainer_from_sid() {
    local work mirror
    mirror=$(debian_mirror)
    [ -n "$mirror" ] || die "no apptainer package here, and no Debian mirror in apt's sources to take one from. On \
Ubuntu: add-apt-repository -y ppa:apptainer/ppa, then run this again" 4
    apt_install patchelf containernetworking-plugins
    say "installing apptainer from sid, its libraries into $LIBS"
    work=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$work'" EXIT
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/new"
    : >"$work/status"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" >"$work/sources.list"
    cat >"$work/apt.conf" <<-EOF
	Dir::Etc::sourcelist "$work/sources.list";
	Dir::Etc::sourceparts "/dev/null";
	Dir::Etc::preferencesparts "/dev/null";
	Dir::State::lists "$work/lists";
	Dir::State::status "$work/status";
	Dir::Cache "$work/cache";
	APT::Sandbox::User "root";
	Acquire::Check-Valid-Until "false";  // a mirror that was frozen at some day will do
	EOF
    (
        cd "$work"
        export APT_CONFIG=$work/apt.conf
        quietly apt-get update
        quietly apt-get download apptainer libc6 libseccomp2 libsqlite3-0
    )
    rm -rf "$LIBS"
    for deb in "$work"/lib*.deb; do dpkg-deb -x "$deb" "$LIBS"; done
    dpkg-deb -x "$work"/apptainer_*.deb "$work/new"
    use_libs_of_sid "$work"/new/usr/bin/apptainer "$work"/new/usr/lib/*/apptainer/bin/starter
    rm -rf "$work/new/usr/share"
    cp -a --no-preserve=ownership "$work"/new/* /
    apptainer version >/dev/null || die "apptainer was installed and does not start"
}

# Debian lets only one of the two be installed; unpacked, they leave each other and this machine's shells alone.
install_modules() (
    [ ! -d "$MODULES" ] || exit 0
    fresh_lists
    say "unpacking environment-modules and lmod into $MODULES"
    rm -rf "$MODULES.new"
    mkdir "$MODULES.new"
    cd "$MODULES.new"
    quietly apt-get download environment-modules lmod
    for name in environment-modules lmod; do dpkg-deb -x "$name"_*.deb "$name"; done
    rm ./*.deb
    mv "$MODULES.new" "$MODULES"
)

# The host's own mirror of Debian: whatever its administrator chose.
debian_mirror() {
    # shellcheck disable=SC2016
    apt-get indextargets --format '$(ORIGIN) $(CODENAME) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
        awk -v release="${RELEASE%% *}" '$1 == "Debian" && $2 == release && $3 == "main" && !n++ { print $4 }'
}

use_libs_of_sid() {
    local libs loader program
    libs=$(dirname "$(find "$LIBS" -name libc.so.6)")
    loader=$(find "$LIBS" -name 'ld-linux-*.so.*' | head -n 1)
    for program in "$@"; do
        patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$libs" "$program"
    done
    # Apptainer starts itself again with LD_LIBRARY_PATH set, which beats RUNPATH but not RPATH.
    for program in "$libs"/libsqlite3.so.0 "$libs"/libseccomp.so.2; do
        patchelf --force-rpath --set-rpath "$libs" "$(readlink -f "$program")"
    done
}

# SingularityCE, which Debian has no package of, as Ubuntu 24.04 has it: setuid. Of the package without its manuals and buildkitd.
install_singularity() (
    [ ! -x "$SINGULARITY/bin/singularity" ] || exit 0
    if [ "$(dpkg --print-architecture)" != amd64 ] || [ ! -d "$LIBS" ] || has singularity; then
        say "leaving out singularity: it is unpacked on amd64 beside Apptainer of sid, where no other is"
        exit 0
    fi
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    say "unpacking singularity-container of Ubuntu 24.04 into $SINGULARITY"
    # debootstrap knows where Ubuntu's packages are.
    ubuntu=$(sed -n 's/^[[:space:]]*default_mirror \(http:..archive\..*\)/\1/p' /usr/share/debootstrap/scripts/gutsy)
    quietly curl -fsS --retry 2 --max-time 300 -o "$work/singularity.deb" "$ubuntu/$SINGULARITY_DEB"
    quietly sha256sum --check - <<<"$SINGULARITY_SHA256  $work/singularity.deb"
    dpkg-deb -x "$work/singularity.deb" "$work/new"
    cd "$work/new"
    rm usr/lib/*/singularity/bin/singularity-buildkitd
    use_libs_of_sid usr/bin/singularity usr/lib/*/singularity/bin/starter{,-suid}
    mkdir -p "$SINGULARITY"
    cp -a --no-preserve=ownership etc var /
    cp -a --no-preserve=ownership usr/lib/* /usr/lib/
    chmod 4755 /usr/lib/*/singularity/bin/starter-suid
    cp -a --no-preserve=ownership usr/bin "$SINGULARITY/"
    [ -d /run/systemd/system ] || sed -i 's/^systemd cgroups = yes/systemd cgroups = no/' /etc/singularity/singularity.conf
    allow_root_without_sys_resource "$SINGULARITY/bin/singularity" /etc/singularity/singularity.conf
)

# As root Apptainer asks for every capability, and a machine that withholds one makes it fail. Only then: ask for the
# others by name.
allow_root_without_sys_resource() {
    local cap_sys_resource=24 runtime=$1 config=$2 effective capabilities
    effective=$(awk '/^CapEff/ { print $2 }' /proc/self/status)
    if (( (16#$effective >> cap_sys_resource) & 1 )); then return; fi
    if grep -q '^root default capabilities = file' "$config"; then return; fi
    say "no CAP_SYS_RESOURCE here: ${runtime##*/} asks for the other capabilities when root"
    sed -i 's/^root default capabilities = .*/root default capabilities = file/' "$config"
    capabilities=$("$runtime" capability avail | grep -o '^CAP_[A-Z_]*' | grep -vx CAP_SYS_RESOURCE | paste -sd,)
    quietly "$runtime" capability add --user root "$capabilities"
}

start() {
    local service services=("$@")
    [ ${#services[@]} -gt 0 ] || services=(docker registry slurm gridengine oar)
    [ "$(id -u)" = 0 ] || die "needs root: sudo tests/services.sh start ${services[*]}" 4
    open_fuse
    for service in "${services[@]}"; do
        case $service in
            docker | registry | slurm | gridengine | oar) "start_$service" ;;
            *) die "unknown service '$service'; known: docker registry slurm gridengine oar" 2 ;;
        esac
    done
}

start_docker() {
    docker_answers && return
    has dockerd || die "dockerd is not installed: tests/services.sh install docker" 4
    if [ -d /run/systemd/system ]; then
        systemctl start docker
    else
        daemon dockerd dockerd
    fi
    wait_for docker_answers dockerd
}

# Asked over its socket: a client of another version earlier on PATH does not matter.
docker_answers() { curl -sf --max-time 5 --unix-socket /var/run/docker.sock http://localhost/_ping >/dev/null 2>&1; }

start_registry() {
    registry_answers && return
    has docker-registry || die "docker-registry is not installed: tests/services.sh install registry" 4
    mkdir -p "$REGISTRY_HOME/data"
    cat >"$REGISTRY_HOME/config.yml" <<-EOF
	version: 0.1
	log: {level: warn}
	storage: {filesystem: {rootdirectory: $REGISTRY_HOME/data}, delete: {enabled: true}}
	http: {addr: "$REGISTRY"}
	EOF
    daemon registry docker-registry serve "$REGISTRY_HOME/config.yml"
    wait_for registry_answers registry
}

registry_answers() { curl -sf --max-time 5 "http://$REGISTRY/v2/" >/dev/null 2>&1; }

# A cluster of two nodes with four GPUs each, all on this machine; the GPUs are names for /dev/null.
start_slurm() {
    slurm_answers && return
    has slurmctld || die "slurmctld is not installed: tests/services.sh install slurm" 4
    if [ -e /etc/slurm/slurm.conf ] && ! grep -q "$SLURM_HOME" /etc/slurm/slurm.conf; then
        die "this machine has a Slurm of its own (/etc/slurm/slurm.conf)" 4
    fi
    mkdir -p "$SLURM_HOME"/{state,dev,spool/c1,spool/c2}
    for gpu in 0 1 2 3; do
        [ -e "$SLURM_HOME/dev/gpu$gpu" ] || mknod -m 666 "$SLURM_HOME/dev/gpu$gpu" c 1 3
    done
    write_slurm_conf
    grep -qw c2 /etc/hosts || echo '127.0.0.1 c1 c2' >>/etc/hosts
    command install -d -o munge -g munge -m 755 /run/munge
    munge -n >/dev/null 2>&1 || runuser -u munge -- /usr/sbin/munged 9>&-
    say "starting slurmctld and two slurmd (logs: $LOGS/ekiben-slurm*.log)"
    slurmctld 9>&-
    for node in c1 c2; do slurmd -N "$node" 9>&-; done
    wait_for slurm_answers slurmctld
}

slurm_answers() { [ "$(timeout 2 sinfo --noheader --states idle,mixed,allocated --format %D 2>/dev/null)" = 2 ]; }

write_slurm_conf() {
    mkdir -p /etc/slurm
    cat >/etc/slurm/gres.conf <<-EOF
	AutoDetect=off
	NodeName=c1,c2 Name=gpu Type=h200 File=$SLURM_HOME/dev/gpu[0-3]
	EOF
    # config_overrides: the nodes may claim more cores than there are. EnforcePartLimits: what cannot run is refused.
    # cred_expire: a job that goes back into the queue waits that long, by default two minutes.
    # pgid: signals reach a task and its group, as with proctrack/cgroup; linuxproc would also end what serves a SIF's files.
    cat >/etc/slurm/slurm.conf <<-EOF
	ClusterName=ekiben
	SlurmctldHost=$(hostname -s)(127.0.0.1)
	SlurmUser=root
	SlurmdUser=root
	AuthType=auth/munge
	AuthInfo=cred_expire=5
	StateSaveLocation=$SLURM_HOME/state
	SlurmdSpoolDir=$SLURM_HOME/spool/%n
	SlurmctldPidFile=$SLURM_HOME/slurmctld.pid
	SlurmdPidFile=$SLURM_HOME/slurmd-%n.pid
	SlurmctldLogFile=$LOGS/ekiben-slurmctld.log
	SlurmdLogFile=$LOGS/ekiben-slurmd-%n.log
	ProctrackType=proctrack/pgid
	TaskPlugin=task/none
	JobAcctGatherType=jobacct_gather/linux
	AccountingStorageType=accounting_storage/none
	SelectType=select/cons_tres
	SelectTypeParameters=CR_Core_Memory
	SlurmdParameters=config_overrides
	MpiDefault=none
	ReturnToService=2
	SchedulerParameters=sched_interval=2,bf_interval=2
	EnforcePartLimits=ALL
	GresTypes=gpu
	NodeName=c1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=17001 CPUs=8 RealMemory=8000 Gres=gpu:h200:4
	NodeName=c2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=17002 CPUs=8 RealMemory=8000 Gres=gpu:h200:4
	PreemptType=preempt/partition_prio
	PreemptMode=REQUEUE
	PartitionName=gpu Nodes=c1,c2 Default=YES MaxTime=24:00:00 State=UP PriorityTier=1 GraceTime=60
	PartitionName=urgent Nodes=c1,c2 MaxTime=1:00:00 State=UP PriorityTier=10 PreemptMode=OFF
	EOF
}

preseed_gridengine() {
    is_installed gridengine-master || debconf-set-selections <<-EOF
	gridengine-master shared/gridengineconfig boolean true
	gridengine-common shared/gridengineconfig boolean true
	gridengine-common shared/gridenginemaster string $(hostname -s)
	gridengine-common shared/gridenginecell string default
	EOF
}

# Two hosts with four GPUs each, under ABCI's names for parts of a node: ge1 is this machine, ge2 a network and host name of its
# own on it, at the other end of hsn1.
start_gridengine() {
    gridengine_answers && return
    has sge_qmaster || die "sge_qmaster is not installed: tests/services.sh install gridengine" 4
    if [ -s "$GE_COMMON/act_qmaster" ] && ! grep -qxE "ge1|$(hostname -s)" "$GE_COMMON/act_qmaster"; then
        die "this machine has a Grid Engine of its own ($GE_COMMON/act_qmaster)" 4
    fi
    mkdir -p "$GE_HOME"
    grep -qw ge2 /etc/hosts || printf '10.77.0.1 ge1\n10.77.0.2 ge2\n' >>/etc/hosts
    # Whatever name this machine's addresses resolve to, it is ge1.
    echo "ge1 localhost $(awk '$1 == "127.0.0.1" || $1 == "127.0.1.1" { $1 = ""; print }' /etc/hosts | tr ' ' '\n' |
        grep -vxE 'localhost|c1|c2|' | sort -u | paste -sd ' ') $(hostname -s)" >"$GE_COMMON/host_aliases"
    echo ge1 >"$GE_COMMON/act_qmaster"
    if ! ip link show hsn1 >/dev/null 2>&1; then
        ip link add hsn1 type veth peer name hsn2
        ip address add 10.77.0.1/24 dev hsn1
        ip link set hsn1 up
    fi
    pgrep -x sge_qmaster >/dev/null || daemon gridengine unshare --uts bash -c 'hostname ge1; runuser -u sgeadmin -- sge_qmaster'
    wait_for qmaster_answers gridengine
    quietly configure_gridengine
    pgrep -x sge_execd >/dev/null || start_execds
    wait_for gridengine_answers gridengine
}

start_execds() {
    rm -f "$GE_HOME/ge2.pid"                     # of an earlier start of the machine
    daemon gridengine-ge1 unshare --uts bash -c 'hostname ge1; exec sge_execd'
    cat >"$GE_HOME/ge2.sh" <<-EOF
	hostname ge2
	echo \$\$ >"$GE_HOME/ge2.pid"
	until ip link show hsn2 >/dev/null 2>&1; do sleep 0.1; done
	ip link set lo up
	ip address add 10.77.0.2/24 dev hsn2
	ip link set hsn2 up
	exec sge_execd
	EOF
    daemon gridengine-ge2 unshare --net --uts bash "$GE_HOME/ge2.sh"
    wait_for ge2_is_there gridengine-ge2
    ip link set hsn2 netns "$(cat "$GE_HOME/ge2.pid")"
}

ge2_is_there() {
    local network
    network=$(readlink "/proc/$(cat "$GE_HOME/ge2.pid" 2>/dev/null)/ns/net") && [ "$network" != "$(readlink /proc/self/ns/net)" ]
}

qmaster_answers() { timeout 3 qconf -sh >/dev/null 2>&1; }

# A host is there when it has told its load.
gridengine_answers() {
    [ "$(timeout 3 qhost 2>/dev/null | awk '$1 ~ /^ge[12]$/ && $4 != "-"' | wc -l)" = 2 ]
}

configure_gridengine() (
    cd "$GE_HOME"
    qconf -as ge1,ge2 || true  # a job of several hosts submits itself anew from its first, which is either
    qconf -ah ge2 || true
    qconf -sc >complexes
    for name in rt_F rt_G.large rt_G.small; do
        grep -q "^$name " complexes || echo "$name $name INT <= YES JOB 0 0" >>complexes
    done
    grep -q '^gpu ' complexes || echo 'gpu gpu INT <= YES YES 0 0' >>complexes
    qconf -Mc complexes
    for host in ge1 ge2; do
        printf '%s\n' "hostname $host" 'load_scaling NONE' 'complex_values rt_F=1,rt_G.small=4,rt_G.large=1,gpu=4,slots=8' \
            'user_lists NONE' 'xuser_lists NONE' 'projects NONE' 'xprojects NONE' 'usage_scaling NONE' 'report_variables NONE' >host
        qconf -Ae host || qconf -Me host
    done
    # Each host ends what has its own group ids; on one machine they must not have the same.
    mkdir -p local
    echo 'gid_range 65501-65600' >local/ge2
    qconf -Aconf local/ge2 || qconf -Mconf local/ge2
    printf '%s\n' 'group_name @allhosts' 'hostlist ge1 ge2' >group
    qconf -Ahgrp group || qconf -Mhgrp group
    # control_slaves: qrsh -inherit may start what runs on the other hosts of a job. One slot is one host.
    printf '%s\n' 'pe_name nodes' 'slots 999' 'user_lists NONE' 'xuser_lists NONE' 'start_proc_args NONE' 'stop_proc_args NONE' \
        'allocation_rule 1' 'control_slaves TRUE' 'job_is_first_task FALSE' 'urgency_slots min' 'accounting_summary FALSE' \
        'qsort_args NONE' >environment
    qconf -Ap environment || qconf -Mp environment
    qconf -sq | sed -e 's/^qname .*/qname all.q/; s/^hostlist .*/hostlist @allhosts/; s/^slots .*/slots 8/' \
        -e 's/^h_rt .*/h_rt 24:00:00/; s/^shell_start_mode .*/shell_start_mode unix_behavior/; s/^pe_list .*/pe_list nodes/' \
        -e 's/^load_thresholds .*/load_thresholds NONE/' >queue
    qconf -Aq queue || qconf -Mq queue
    qconf -ssconf | sed -e 's/^schedule_interval .*/schedule_interval 0:0:2/; s/^flush_submit_sec .*/flush_submit_sec 1/' \
        -e 's/^flush_finish_sec .*/flush_finish_sec 1/' >schedule
    qconf -Msconf schedule
)

# A server and two nodes, all on this machine, with a PostgreSQL of its own.
start_oar() {
    oar_answers && return
    has oar-server || die "oar-server is not installed: tests/services.sh install oar" 4
    [ -e "$OAR_HOME/made" ] || make_oar
    pg_lsclusters -h | grep -q ' ekiben .* online' || quietly pg_ctlcluster "$(oar_postgresql)" ekiben start 9>&-
    grep -qw oar2 /etc/hosts || echo '127.0.0.1 oar1 oar2' >>/etc/hosts
    mkdir -p /run/sshd
    port_answers 6667 || /usr/sbin/sshd -f /etc/oar/sshd_config 9>&- 2>>"$LOGS/ekiben-oar.log"
    say "starting oar-server (log: /var/log/oar.log)"
    port_answers 6666 || oar-server 9>&- >/dev/null
    wait_for oar_server_answers oar
    add_oar_nodes
    wait_for oar_answers oar
}

oar_postgresql() { find /usr/lib/postgresql -mindepth 1 -maxdepth 1 -printf '%f\n' | sort -n | tail -n 1; }

make_oar() {
    local script
    say "making OAR's database"
    mkdir -p "$OAR_HOME"
    [ -d "/etc/postgresql/$(oar_postgresql)/ekiben" ] || quietly pg_createcluster -p "$OAR_DATABASE_PORT" "$(oar_postgresql)" ekiben
    pg_lsclusters -h | grep -q ' ekiben .* online' || quietly pg_ctlcluster "$(oar_postgresql)" ekiben start 9>&-
    oar_sql -c "DROP DATABASE IF EXISTS oar" -c "DROP ROLE IF EXISTS oar" -c "DROP ROLE IF EXISTS oar_ro" \
        -c "CREATE ROLE oar LOGIN PASSWORD 'oar'" -c "CREATE ROLE oar_ro LOGIN PASSWORD 'oar_ro'" -c "CREATE DATABASE oar OWNER oar"
    for script in pg_structure pg_default_admission_rules default_data; do
        PGPASSWORD=oar quietly psql -q -h 127.0.0.1 -p "$OAR_DATABASE_PORT" -U oar -d oar -f "/usr/lib/oar/database/$script.sql"
    done
    oar_sql -d oar -c "GRANT SELECT ON ALL TABLES IN SCHEMA public TO oar_ro"
    # When a user's last job ends, OAR removes all that is the user's in /tmp, /dev/shm and /var/tmp: here tests keep theirs there.
    sed -i 's|^my @Tmp_dir_to_clear = .*|my @Tmp_dir_to_clear = ();|' /etc/oar/job_resource_manager*.pl
    grep -qx 'my @Tmp_dir_to_clear = ();' /etc/oar/job_resource_manager_cgroups.pl || die "OAR would clear /tmp: not started"
    # No waiting between jobs.
    sed -i -e "s/^DB_PORT=.*/DB_PORT=\"$OAR_DATABASE_PORT\"/; s/^DB_BASE_PASSWD=.*/DB_BASE_PASSWD=\"oar\"/" \
        -e 's/^DB_BASE_PASSWD_RO=.*/DB_BASE_PASSWD_RO="oar_ro"/; s/^#JOB_RESOURCE_MANAGER_PROPERTY_DB_FIELD/JOB_RESOURCE_MANAGER_PROPERTY_DB_FIELD/' \
        -e 's/^SCHEDULER_JOB_SECURITY_TIME=.*/SCHEDULER_JOB_SECURITY_TIME="1"/; s/^FINAUD_FREQUENCY=.*/FINAUD_FREQUENCY="0"/' \
        -e 's/^SCHEDULER_GANTT_HOLE_MINIMUM_TIME=.*/SCHEDULER_GANTT_HOLE_MINIMUM_TIME="1"/' /etc/oar/oar.conf
    touch "$OAR_HOME/made"
}

# The database is asked, and not `oarnodes`: on a busy machine that does not answer in time, and a node would be added twice.
add_oar_nodes() {
    local known
    oar_sql -d oar -c "DELETE FROM resources WHERE resource_id NOT IN (SELECT min(resource_id) FROM resources GROUP BY network_address)"
    known=$(runuser -u postgres -- psql -qAt -p "$OAR_DATABASE_PORT" -d oar -c "SELECT network_address FROM resources")
    for node in oar1 oar2; do
        grep -qx "$node" <<<"$known" || quietly timeout 60 oarnodesetting -a -h "$node"
        # OAR suspects a node on which a job could not be started, and starts none there any more.
        if timeout 5 oarnodes -s "$node" 2>/dev/null | grep -q Suspected; then
            quietly timeout 60 oarnodesetting -s Alive -h "$node"
        fi
    done
}

oar_sql() { quietly runuser -u postgres -- psql -q -p "$OAR_DATABASE_PORT" -v ON_ERROR_STOP=1 "$@"; }

port_answers() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

oar_server_answers() { port_answers 6666; }

# Without its database `oarnodes` asks for ever.
oar_answers() {
    has oarnodes && port_answers 6666 && port_answers 6667 && [ "$(timeout 5 oarnodes -s 2>/dev/null | grep -c ': Alive')" = 2 ]
}

# daemon LOG COMMAND…: outlives this script and its terminal, and holds none of its files open.
daemon() {
    local log=$LOGS/ekiben-$1.log
    shift
    say "starting $* (log: $log)"
    setsid --fork "$@" >"$log" 2>&1 </dev/null 9>&-
}

wait_for() {
    local end=$((SECONDS + 60))
    until "$1"; do
        if [ $SECONDS -ge $end ]; then
            tail -n 20 "$LOGS/ekiben-$2.log" >&2 2>/dev/null || true
            die "$2 does not answer after 60 s"
        fi
        sleep 0.2
    done
}

env_lines() {
    line system "${RELEASE#* }, kernel $(uname -r), $(nproc) cores"
    line python "$(first_line python3 --version)"
    line docker "$(docker_version)"
    line apptainer "$(first_line apptainer --version)"
    line singularity "$(first_line "$SINGULARITY/bin/singularity" --version)"
    line buildah "$(first_line buildah --version)"
    line crun "$(first_line crun --version)"
    line mmdebstrap "$(first_line mmdebstrap --version)"
    line mksquashfs "$(first_line mksquashfs -version)"
    line registry "$(registry_version)"
    line skopeo "$(first_line skopeo --version)"
    line slurm "$(slurm_version)"
    line gridengine "$(gridengine_version)"
    line oar "$(oar_version)"
    line modules "$(modules_version)"
    line podman "$(first_line podman --version)"
    line ch-run "$(first_line ch-run --version)"
    line umoci "$(first_line umoci --version)"
    line chromium "$(first_line chromium --version)"
    line fuse "$(stat -c '%A %n' /dev/fuse 2>/dev/null || echo -)"
    line user "$(id "$USER_NAME" 2>/dev/null || echo -), subuid $(grep -s "^$USER_NAME:" /etc/subuid || echo -)"
}

line() { printf '%-11s %s\n' "$1" "$2"; }

first_line() {
    if has "$1"; then "$@" 2>&1 | sed -n 1p || true; else echo -; fi
}

modules_version() {
    [ -d "$MODULES" ] || { echo -; return; }
    echo "$(tclsh8.6 "$MODULES/environment-modules/usr/lib/modulecmd.tcl" sh --version 2>&1 | sed -n 1p)," \
        "Lmod $(basename "$(readlink "$MODULES/lmod/usr/share/lmod/lmod")")"
}

docker_version() {
    has dockerd || { echo -; return; }
    echo "$(first_line dockerd --version), $(docker_answers && echo answers || echo 'does not answer')"
}

registry_version() {
    has docker-registry || { echo -; return; }
    echo "$(first_line docker-registry --version)," \
        "$(registry_answers && echo "answers at $REGISTRY" || echo 'not started')"
}

slurm_version() {
    has slurmctld || { echo -; return; }
    echo "$(first_line slurmctld -V), $(slurm_answers && echo answers || echo 'not started')"
}

gridengine_version() {
    has sge_qmaster || { echo -; return; }
    echo "$(first_line qstat -help), $(gridengine_answers && echo answers || echo 'not started')"
}

oar_version() {
    has oarsub || { echo -; return; }
    echo "$(first_line oarsub --version | sed 's/.*: //'), $(oar_answers && echo answers || echo 'not started')"
}

main() {
    local command=${1:-help}
    [ $# -eq 0 ] || shift
    case $command in
        install | start)
            if [ "$(id -u)" = 0 ]; then
                exec 9>/run/lock/ekiben-services.lock
                flock 9
            fi
            "$command" "$@"
            ;;
        env) env_lines ;;
        *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
}

main "$@"

// Package containerd runs containerd's own tests of snapshotters against bcow-snapshotter.
//
//	BCOW=target/debug/bcow go test -v ./tests/containerd
//
// It needs root, FUSE, and BCOW, the absolute path of bcow; bcow-snapshotter is beside it.
package containerd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

const startWithin = 60 * time.Second

// start runs a snapshotter in a directory of the test, and connects to it as containerd does.
func start(bcow string) testsuite.SnapshotterFunc {
	return func(_ context.Context, root string) (snapshots.Snapshotter, func() error, error) {
		// The path of a socket has at most 108 bytes.
		directory, err := os.MkdirTemp("", "bcow")
		if err != nil {
			return nil, nil, err
		}
		socket := filepath.Join(directory, "s")
		program := filepath.Join(filepath.Dir(bcow), "bcow-snapshotter")
		command := exec.Command(program, "--root", filepath.Join(root, "bcow"), "--socket", socket)
		command.Stderr = os.Stderr
		if err := command.Start(); err != nil {
			return nil, nil, err
		}
		if err := answers(socket); err != nil {
			return nil, nil, errors.Join(err, command.Process.Kill(), command.Wait())
		}
		connection, err := grpc.NewClient("unix://"+socket,
			grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return nil, nil, err
		}
		end := func() error {
			closed := connection.Close()
			signalled := command.Process.Signal(syscall.SIGTERM)
			return errors.Join(closed, signalled, command.Wait(), os.RemoveAll(directory))
		}
		return proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(connection), "bcow"), end, nil
	}
}

// answers waits until a process listens at the socket.
func answers(socket string) error {
	for begin := time.Now(); time.Since(begin) < startWithin; time.Sleep(10 * time.Millisecond) {
		connection, err := net.Dial("unix", socket)
		if err == nil {
			return connection.Close()
		}
	}
	return fmt.Errorf("no process listens at %s", socket)
}

func TestSnapshotter(t *testing.T) {
	bcow := os.Getenv("BCOW")
	if bcow == "" || os.Getuid() != 0 {
		t.Skip("needs root, and BCOW")
	}
	testsuite.SnapshotterSuite(t, "bcow", start(bcow))
}
